-- The sampler's only way to change the run: everything one round decided, at once.
--
-- The lease fences off a sampler that was replaced; the sequence number makes it harmless to repeat a call whose reply
-- was lost. Acknowledged headers, the tracker's new state and the open batch are written together, so a result counts
-- exactly once whenever the sampler dies.
--
-- KEYS: lease, state, samples, tasks, batches, tracker, open, outstanding, counters, evaluations, payload prefix, pin
-- prefix, journal
-- ARGV: owner, lease in ms, sequence number, group, the generators' group, then fourteen lists, each after its length
-- Returns: headers acknowledged; -1: another sampler has the lease, or has committed; -2: Redis lacks what this sampler
-- has written or read; -3: repeated.
local lease, state, samples, tasks, batches, tracker, open, outstanding, counters, evaluations, payloads, pins,
  journal = unpack(KEYS)
-- A lease that ran out and was not taken is ours again: had another sampler committed since, the sequence would differ.
local holder = redis.call('GET', lease)
if holder and holder ~= ARGV[1] then return -1 end
redis.call('DEL', lease) -- a full Redis continues a script whose first write frees memory
redis.call('SET', lease, ARGV[1], 'PX', ARGV[2])
local sequence, last = tonumber(ARGV[3]), tonumber(redis.call('HGET', state, 'sequence') or '0')
if sequence == last and redis.call('HGET', state, 'writer') == ARGV[1] then return -3 end
if sequence <= last then return -1 end
if sequence > last + 1 then return -2 end
-- A Redis that failed over may have lost headers that the sampler had read but not yet counted: their tasks are run
-- again, and a lost answer's reward would be paired with the tokens of another. All headers read are counted at once,
-- in order.
local n = tonumber(ARGV[6])
local read = n > 0 and redis.call('XPENDING', samples, ARGV[4], ARGV[7], ARGV[6 + n], n) or {}
for i = 1, n do
  if not read[i] or read[i][1] ~= ARGV[6 + i] then return -2 end
end

local at = 6
local function list()
  local first = at + 1
  at = first + tonumber(ARGV[at])
  return first, at - 1
end
-- Lua's unpack is limited by its stack, so long lists go in slices (of an even length, for pairs).
local function each_slice(visit)
  local first, final = list()
  for i = first, final, 4000 do visit(unpack(ARGV, i, math.min(i + 3999, final))) end
end

local counted, superseded = 0, 0
each_slice(function(...)
  counted = counted + redis.call('XACK', samples, ARGV[4], ...)
  redis.call('XDEL', samples, ...)
end)
each_slice(function(...) redis.call('HSET', tracker, ...) end)
each_slice(function(...) redis.call('HSET', open, ...) end)
each_slice(function(...) redis.call('HDEL', open, ...) end)
each_slice(function(...) redis.call('HDEL', outstanding, ...) end)

each_slice(function(...) redis.call('HSET', outstanding, ...) end)
local first, final = list() -- evaluations that are over: whatever is left of their tasks will not be answered
for i = first, final do
  local stream = tasks .. ':' .. ARGV[i]
  local left = redis.call('XLEN', stream)
  if left > 0 then redis.call('HINCRBY', counters, 'superseded', left) end
  superseded = superseded + left
  redis.call('UNLINK', stream, pins .. ARGV[i])
end
first, final = list() -- new tasks: evaluation or '', id, task
local streams = {}
for i = first, final, 3 do
  local stream = ARGV[i] == '' and tasks or tasks .. ':' .. ARGV[i]
  if stream ~= tasks and not streams[stream] then
    if redis.call('EXISTS', stream) == 0 then redis.call('XGROUP', 'CREATE', stream, ARGV[5], '0', 'MKSTREAM') end
    streams[stream] = true
  end
  redis.call('XADD', stream, '*', 'id', ARGV[i + 1], 'task', ARGV[i + 2])
end
redis.call('HINCRBY', counters, 'dispatched', (final - first + 1) / 3)
first, final = list() -- batches
for i = first, final do redis.call('XADD', batches, '*', 'batch', ARGV[i]) end
first, final = list() -- payloads that will not be trained on
for i = first, final do redis.call('UNLINK', payloads .. ARGV[i]) end
first, final = list() -- counters: name, increment
for i = first, final, 2 do redis.call('HINCRBY', counters, ARGV[i], ARGV[i + 1]) end
each_slice(function(...) redis.call('HSET', state, ...) end)
each_slice(function(...) redis.call('HSET', evaluations, ...) end)
first, final = list() -- this commit as the journal has it, if the run keeps one
for i = first, final do redis.call('XADD', journal, '*', 'commit', ARGV[i]) end

redis.call('HINCRBY', counters, 'counted', counted + superseded)
redis.call('HSET', state, 'sequence', sequence, 'writer', ARGV[1])
return counted
