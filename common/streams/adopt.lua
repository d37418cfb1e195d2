-- Take over tasks of processes whose heartbeat has stopped.
--
-- A heartbeat renews all leases of its process, so this script looks for silent processes, not at single leases.
-- A process that loses tasks in this way is told so by a counter at its next heartbeat, should it wake up.
-- Tasks that Redis has delivered to the searching process in a reply that was lost are leased to it once more.
--
-- KEYS: stream to take from, tasks, state, holders, takeovers
-- ARGV: group, consumer, silence in ms, maximum of tasks, maximum of its own leases to check, earliest and latest time
-- in ms that Redis' clock should show, then ids of the entries that the process knows of
-- Returns: the clock's time in ms; (entry id, fields, times delivered before) of each task; 1 if Redis did not know of
-- the searching process
local FORGET = 60 -- times the silence: longer than a process may repeat a call while Redis is away
local stream, tasks, state, holders, takeovers = unpack(KEYS)
local group, consumer, silence, most = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local look, least, latest = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7])
local time, taken = redis.call('TIME'), {}
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function number(value) return string.format('%.0f', value) end
local function leases_of(holder, from, count)
  if redis.call('EXISTS', from) == 0 then return {} end -- an evaluation that is over
  return redis.call('XPENDING', from, group, '-', '+', count, holder)
end

local function claim(leases)
  for _, lease in ipairs(leases) do
    local entry = redis.call('XCLAIM', stream, group, consumer, 0, lease[1])[1]
    if entry and entry[2] then taken[#taken + 1] = {entry[1], entry[2], lease[4]} end
  end
end

-- A full Redis continues a script whose first write frees memory.
local unknown = 1 - redis.call('ZREM', holders, consumer)
redis.call('ZADD', holders, number(now), consumer)
-- If Redis' clock was set, every process counts as just heard from; dead ones are found after `silence` more ms.
-- So does one whose heartbeat is this far ahead: it was recorded before the clock was set back.
local from = (now < least or now > latest) and '-inf' or number(now + silence / 2)
for _, holder in ipairs(redis.call('ZRANGEBYSCORE', holders, from, '+inf')) do
  redis.call('ZADD', holders, number(now), holder)
end
for _, holder in ipairs(redis.call('ZRANGEBYSCORE', holders, '-inf', number(now - silence))) do
  if #taken >= most then break end
  local leases = leases_of(holder, stream, most - #taken)
  claim(leases)
  if #leases > 0 then
    redis.call('HINCRBY', takeovers, holder, 1)
  elseif tonumber(redis.call('ZSCORE', holders, holder)) < now - FORGET * silence then
    -- Long dead: forgotten once it holds no task of training or of the evaluation under way.
    local evaluation = tasks .. ':' .. (redis.call('HGET', state, 'evaluating') or '')
    if #leases_of(holder, tasks, 1) == 0 and #leases_of(holder, evaluation, 1) == 0 then
      redis.call('ZREM', holders, holder)
      redis.call('HDEL', takeovers, holder)
      redis.call('XGROUP', 'DELCONSUMER', tasks, group, holder)
    end
  end
end
if #taken < most and redis.call('EXISTS', stream) == 1 then
  local held, missing = {}, {}
  for i = 8, #ARGV do held[ARGV[i]] = true end
  for _, lease in ipairs(redis.call('XPENDING', stream, group, 'IDLE', silence, '-', '+', look, consumer)) do
    if not held[lease[1]] and #taken + #missing < most then missing[#missing + 1] = lease end
  end
  claim(missing)
end
return {number(now), taken, unknown}
