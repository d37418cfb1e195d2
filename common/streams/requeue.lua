-- Put tasks back for any generator: acknowledge the old entry and add a new one, or neither.
-- Only tasks that this generator still holds: a generator that took one over finishes it.
--
-- KEYS: tasks
-- ARGV: group, consumer, then four for each task: entry id, task id, task, attempt
local tasks, group, consumer, moved = KEYS[1], ARGV[1], ARGV[2], 0
if redis.call('EXISTS', tasks) == 0 then return 0 end -- an evaluation that is over
for i = 3, #ARGV, 4 do
  local lease = redis.call('XPENDING', tasks, group, ARGV[i], ARGV[i], 1)[1]
  if lease and lease[2] == consumer then
    redis.call('XACK', tasks, group, ARGV[i])
    -- An entry that was deleted by hand stays deleted: the sampler sends its task again.
    if redis.call('XDEL', tasks, ARGV[i]) == 1 then
      redis.call('XADD', tasks, '*', 'id', ARGV[i + 1], 'task', ARGV[i + 2], 'attempt', ARGV[i + 3])
      moved = moved + 1
    end
  end
end
return moved
