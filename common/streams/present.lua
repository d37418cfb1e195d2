-- Record a process's heartbeat, publish its status, and forget processes that have long been silent.
-- A heartbeat far in the future comes from a process that died before Redis' clock was set back.
--
-- KEYS: processes, alive
-- ARGV: process id, its values, silence in ms after which a process is forgotten
local processes, alive = KEYS[1], KEYS[2]
local time = redis.call('TIME')
local now, silence = time[1] * 1000 + math.floor(time[2] / 1000), tonumber(ARGV[3])
local function number(value) return string.format('%.0f', value) end
redis.call('ZREM', alive, ARGV[1]) -- a full Redis continues a script whose first write frees memory
for _, range in ipairs({{'-inf', number(now - silence)}, {number(now + silence), '+inf'}}) do
  for _, gone in ipairs(redis.call('ZRANGEBYSCORE', alive, range[1], range[2])) do
    redis.call('HDEL', processes, gone)
    -- The others want to know since when the learner has been gone.
    if gone ~= 'learner' or range[2] == '+inf' then redis.call('ZREM', alive, gone) end
  end
end
redis.call('ZADD', alive, number(now), ARGV[1])
redis.call('HSET', processes, ARGV[1], ARGV[2])
return 1
