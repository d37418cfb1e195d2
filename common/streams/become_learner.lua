-- Make a process the run's learner, with an epoch one higher than the last learner's.
--
-- KEYS: learner
-- ARGV: owner
-- Returns: the epoch
redis.call('HDEL', KEYS[1], 'owner') -- a full Redis continues a script whose first write frees memory
redis.call('HSET', KEYS[1], 'owner', ARGV[1])
return redis.call('HINCRBY', KEYS[1], 'epoch', 1)
