-- A relay of a machine serves weights.
--
-- KEYS: relays of the machine
-- ARGV: name, its entry, milliseconds until the key expires
redis.call('HDEL', KEYS[1], ARGV[1]) -- a script whose first write frees memory may go on where Redis has no more to give
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
