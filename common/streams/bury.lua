-- Keep a dead letter, drop the oldest ones, and remove its entry from the stream, if one is named. If that entry is
-- already gone, nothing happens: the call was repeated because its reply was lost.
--
-- KEYS: dead, the entry's stream, counters
-- ARGV: letter, most letters, group, entry id or ''
redis.call('HDEL', KEYS[3], '') -- a full Redis continues a script whose first write frees memory
if ARGV[4] ~= '' then
  local acknowledged = redis.call('XACK', KEYS[2], ARGV[3], ARGV[4])
  if acknowledged + redis.call('XDEL', KEYS[2], ARGV[4]) == 0 then return 0 end
  redis.call('HINCRBY', KEYS[3], 'dead', 1)
end
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', 'letter', ARGV[1])
return 1
