-- Return the tasks that a generator no longer holds: another took over or finished them, or their evaluation is over.
--
-- KEYS: tasks
-- ARGV: group, consumer, then entry ids
local tasks, group, consumer, lost = KEYS[1], ARGV[1], ARGV[2], {}
local exists = redis.call('EXISTS', tasks) == 1
for i = 3, #ARGV do
  local lease = exists and redis.call('XPENDING', tasks, group, ARGV[i], ARGV[i], 1)[1]
  if not lease or lease[2] ~= consumer then lost[#lost + 1] = ARGV[i] end
end
return lost
