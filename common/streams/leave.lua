-- A generator leaves; it is forgotten if it holds nothing.
--
-- KEYS: tasks, holders, takeovers
-- ARGV: group, consumer
local tasks, holders, takeovers, group, consumer = KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[2]
if #redis.call('XPENDING', tasks, group, '-', '+', 1, consumer) > 0 then return 0 end
redis.call('ZREM', holders, consumer)
redis.call('HDEL', takeovers, consumer)
redis.call('XGROUP', 'DELCONSUMER', tasks, group, consumer)
return 1
