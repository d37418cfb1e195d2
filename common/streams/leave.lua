-- A generator leaves: it is forgotten if it holds no task of training or of the evaluation under way.
--
-- KEYS: tasks, state, holders, takeovers
-- ARGV: group, consumer
local tasks, state, holders, takeovers, group, consumer = KEYS[1], KEYS[2], KEYS[3], KEYS[4], ARGV[1], ARGV[2]
for _, stream in ipairs({tasks, tasks .. ':' .. (redis.call('HGET', state, 'evaluating') or '')}) do
  if redis.call('EXISTS', stream) == 1 and #redis.call('XPENDING', stream, group, '-', '+', 1, consumer) > 0 then
    return 0 -- another process takes this over once the heartbeat has stopped
  end
end
redis.call('ZREM', holders, consumer)
redis.call('HDEL', takeovers, consumer)
redis.call('XGROUP', 'DELCONSUMER', tasks, group, consumer)
return 1
