-- Delete everything of a run that has not trained yet, and store its new configuration.
--
-- KEYS: config, reconfigured
-- ARGV: the configuration as it was read, the new one, ms for which it settles, prefix of the run's keys, release
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local pattern = ARGV[4]:gsub('[%*%?%[%]%^\\]', '\\%0') .. '*'
local cursor = '0'
repeat
  local reply = redis.call('SCAN', cursor, 'MATCH', pattern, 'COUNT', 1000)
  cursor = reply[1]
  for _, key in ipairs(reply[2]) do redis.call('UNLINK', key) end
until cursor == '0'
redis.call('SET', KEYS[1], ARGV[2])
redis.call('SET', ARGV[4] .. 'release', ARGV[5])
redis.call('SET', KEYS[2], '1', 'PX', ARGV[3])
return 1
