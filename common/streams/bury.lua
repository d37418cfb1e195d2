-- Keep a dead letter; the oldest go. The entry that it is of leaves its stream, if one is named.
--
-- KEYS: dead, the entry's stream, counters
-- ARGV: letter, most letters, group, entry id or ''
redis.call('HDEL', KEYS[3], '') -- a script whose first write frees memory may go on where Redis has no more to give
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', 'letter', ARGV[1])
if ARGV[4] ~= '' then
  redis.call('XACK', KEYS[2], ARGV[3], ARGV[4])
  redis.call('XDEL', KEYS[2], ARGV[4])
  redis.call('HINCRBY', KEYS[3], 'dead', 1)
end
return 1
