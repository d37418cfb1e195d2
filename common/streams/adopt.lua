-- Take over tasks of generators whose heartbeat has stopped.
--
-- A heartbeat renews all that a generator has leased, so a search looks at those that are silent, not at what is leased.
-- Whoever loses tasks in this way finds it counted at its next heartbeat, should it wake up.
--
-- KEYS: stream to take from, tasks, state, holders, takeovers
-- ARGV: group, consumer, silence in ms, most tasks
-- Returns: (entry id, fields, times delivered before) of each task
local stream, tasks, state, holders, takeovers = unpack(KEYS)
local group, consumer, silence, most = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local time, taken = redis.call('TIME'), {}
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function number(value) return string.format('%.0f', value) end
local function leases_of(holder, from, count)
  if redis.call('EXISTS', from) == 0 then return {} end -- an evaluation that is over
  return redis.call('XPENDING', from, group, '-', '+', count, holder)
end

redis.call('ZREM', holders, consumer) -- a script whose first write frees memory may go on where Redis has no more to give
redis.call('ZADD', holders, number(now), consumer)
-- Redis' clock was set back since: the dead among them are silent from now on, the living renew their own.
for _, holder in ipairs(redis.call('ZRANGEBYSCORE', holders, number(now + silence / 2), '+inf')) do
  redis.call('ZADD', holders, number(now), holder)
end
for _, holder in ipairs(redis.call('ZRANGEBYSCORE', holders, '-inf', number(now - silence))) do
  if #taken >= most then break end
  local leases = leases_of(holder, stream, most - #taken)
  for _, lease in ipairs(leases) do
    local entry = redis.call('XCLAIM', stream, group, consumer, 0, lease[1])[1]
    if entry and entry[2] then taken[#taken + 1] = {entry[1], entry[2], lease[4]} end
  end
  if #leases > 0 then
    redis.call('HINCRBY', takeovers, holder, 1)
  elseif tonumber(redis.call('ZSCORE', holders, holder)) < now - 3 * silence then
    -- Long dead; forgotten once it holds nothing, of training and of the evaluation under way.
    local evaluation = tasks .. ':' .. (redis.call('HGET', state, 'evaluating') or '')
    if #leases_of(holder, tasks, 1) == 0 and #leases_of(holder, evaluation, 1) == 0 then
      redis.call('ZREM', holders, holder)
      redis.call('HDEL', takeovers, holder)
      redis.call('XGROUP', 'DELCONSUMER', tasks, group, holder)
    end
  end
end
return taken
