-- Put tasks back for anyone: acknowledge the old entry and add a new one, or neither.
--
-- KEYS: tasks
-- ARGV: group, then four for each task: entry id, task id, task, attempt
local tasks, group, moved = KEYS[1], ARGV[1], 0
for i = 2, #ARGV, 4 do
  if redis.call('XACK', tasks, group, ARGV[i]) == 1 then
    redis.call('XDEL', tasks, ARGV[i])
    redis.call('XADD', tasks, '*', 'id', ARGV[i + 1], 'task', ARGV[i + 2], 'attempt', ARGV[i + 3])
    moved = moved + 1
  end
end
return moved
