-- Record the heartbeat of a generator, which renews the leases of all its tasks.
--
-- KEYS: holders, takeovers, finished, state, then the streams of evaluations that it has tasks of
-- ARGV: consumer
-- Returns: how often its tasks were taken over, or -1 if Redis did not know of it; 1 if the run is over; name of the
-- evaluation under way or ''; of each stream, 1 if it exists
local holders, takeovers, finished, state = unpack(KEYS)
local consumer, time = ARGV[1], redis.call('TIME')
-- A full Redis continues a script whose first write frees memory.
local registered = redis.call('ZREM', holders, consumer) == 1
redis.call('ZADD', holders, string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)), consumer)
local reply = {registered and tonumber(redis.call('HGET', takeovers, consumer) or '0') or -1}
reply[2] = redis.call('EXISTS', finished)
reply[3] = redis.call('HGET', state, 'evaluating') or ''
for i = 5, #KEYS do reply[#reply + 1] = redis.call('EXISTS', KEYS[i]) end
return reply
