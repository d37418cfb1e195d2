-- Set a small key that others wait for, even if Redis is full.
--
-- KEYS: key
-- ARGV: value, seconds until it expires or 0
redis.call('DEL', KEYS[1]) -- a full Redis continues a script whose first write frees memory
redis.call('SET', KEYS[1], ARGV[1])
if ARGV[2] ~= '0' then redis.call('EXPIRE', KEYS[1], ARGV[2]) end
return 1
