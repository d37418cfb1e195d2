-- Store a run's changed configuration, and what has changed.
--
-- KEYS: config, reconfigured, changes, finished
-- ARGV: the configuration as it was read, the new one, ms for which it settles, '1' if there is more to train, then
-- the changes as JSON
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1]) -- a full Redis continues a script whose first write frees memory
redis.call('SET', KEYS[1], ARGV[2])
redis.call('SET', KEYS[2], '1', 'PX', ARGV[3])
if ARGV[4] == '1' then redis.call('DEL', KEYS[4]) end
for i = 5, #ARGV do redis.call('RPUSH', KEYS[3], ARGV[i]) end
return 1
