-- Put a dead letter's entry back on its stream; nothing happens if the letter is gone: it was put back already.
-- Its result will be counted once more, so it counts as dispatched once more.
--
-- KEYS: dead, the entry's stream, counters
-- ARGV: dead letter, 1 for what will be counted or 0, then the entry's fields
if redis.call('XDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('XADD', KEYS[2], '*', unpack(ARGV, 3))
redis.call('HINCRBY', KEYS[3], 'dispatched', ARGV[2])
return 1
