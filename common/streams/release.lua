-- A checkpoint holds these batches' gradients: acknowledge them and free their payloads, together.
--
-- KEYS: batches, payload prefix, counters
-- ARGV: group, number of batches, entry ids, sample ids
local group, n, released = ARGV[1], tonumber(ARGV[2]), 0
for i = 3, 2 + n do
  released = released + redis.call('XACK', KEYS[1], group, ARGV[i])
  redis.call('XDEL', KEYS[1], ARGV[i])
end
for i = 3 + n, #ARGV do redis.call('UNLINK', KEYS[2] .. ARGV[i]) end
redis.call('HINCRBY', KEYS[3], 'batches_released', released)
return released
