-- The learner's only way to change the run: it announces a version, where its weights are, and frees batches.
--
-- The epoch fences off a learner that was replaced while it stood still: it finds a higher one and changes nothing. A
-- lower one means that Redis has lost its last writes.
--
-- KEYS: learner, steps, endpoints, batches, counters, payload prefix
-- ARGV: owner, epoch, step or '', steps kept, endpoint or '', group, entries of the newest batch read and the newest step
-- announced, each or '', number of batches, entry ids, sample ids
-- Returns: batches released, and the entry of the step or ''; or -1 and the owner of a higher epoch, '' if Redis knows
-- no learner; or -2 and '': Redis lacks one of those entries, or the sampler has reset the run
local learner, steps, endpoints, batches, counters, payloads = unpack(KEYS)
local owner, epoch = ARGV[1], tonumber(ARGV[2])
local holder = redis.call('HGET', learner, 'owner')
if not holder then return {-1, ''} end
if holder == '' then return {-2, ''} end
local newest = tonumber(redis.call('HGET', learner, 'epoch'))
if newest > epoch or (newest == epoch and holder ~= owner) then return {-1, holder} end
for i, stream in ipairs({batches, steps}) do
  local entry = ARGV[6 + i]
  if entry ~= '' and #redis.call('XRANGE', stream, entry, entry) == 0 then return {-2, ''} end
end
redis.call('HDEL', learner, '') -- a full Redis continues a script whose first write frees memory
if newest < epoch then redis.call('HSET', learner, 'owner', owner, 'epoch', epoch) end

local announced = ''
if ARGV[3] ~= '' then announced = redis.call('XADD', steps, 'MAXLEN', '~', ARGV[4], '*', 'step', ARGV[3]) end
if ARGV[5] ~= '' then redis.call('HSET', endpoints, 'weights', ARGV[5]) end
local n, released = tonumber(ARGV[9]), 0
for i = 10, 9 + n do
  redis.call('XACK', batches, ARGV[6], ARGV[i])
  released = released + redis.call('XDEL', batches, ARGV[i])
end
for i = 10 + n, #ARGV, 1000 do
  local keys = {}
  for j = i, math.min(i + 999, #ARGV) do keys[#keys + 1] = payloads .. ARGV[j] end
  redis.call('UNLINK', unpack(keys))
end
if released > 0 then redis.call('HINCRBY', counters, 'batches_released', released) end
return {released, announced}
