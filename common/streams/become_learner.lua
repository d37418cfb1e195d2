-- The run has another learner: its epoch is one higher than that of the last one.
--
-- KEYS: learner
-- ARGV: owner
-- Returns: the epoch
redis.call('HDEL', KEYS[1], 'owner') -- a script whose first write frees memory may go on where Redis has no more to give
redis.call('HSET', KEYS[1], 'owner', ARGV[1])
return redis.call('HINCRBY', KEYS[1], 'epoch', 1)
