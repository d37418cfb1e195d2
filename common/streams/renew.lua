-- Redis' clock was set forward, so that everybody looks silent: whoever lives keeps its tasks, and those of whoever is
-- dead are taken over after another silence.
--
-- KEYS: holders
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local names = redis.call('ZRANGE', KEYS[1], 0, -1)
for _, holder in ipairs(names) do redis.call('ZADD', KEYS[1], now, holder) end
return #names
