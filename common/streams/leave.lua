-- Forget consumers that hold nothing: the one named, or all that have been silent for long.
--
-- KEYS: tasks
-- ARGV: group, consumer or '', silence in ms
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end -- an evaluation that is over
for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local consumer = {}
  for i = 1, #info, 2 do consumer[info[i]] = info[i + 1] end
  if consumer.pending == 0 and (consumer.name == ARGV[2] or consumer.idle > tonumber(ARGV[3])) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], consumer.name)
  end
end
return 1
