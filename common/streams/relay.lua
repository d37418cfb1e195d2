-- Announce a relay that serves weights to its machine.
--
-- KEYS: relays of the machine
-- ARGV: name, its entry, milliseconds until the key expires
redis.call('HDEL', KEYS[1], ARGV[1]) -- a full Redis continues a script whose first write frees memory
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
