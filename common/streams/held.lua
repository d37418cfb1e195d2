-- Return the tasks that a process no longer holds: another took over or finished them, or their evaluation is over.
--
-- KEYS: stream
-- ARGV: group, consumer, then entry ids
local stream, group, consumer, lost = KEYS[1], ARGV[1], ARGV[2], {}
local exists = redis.call('EXISTS', stream) == 1
for i = 3, #ARGV do
  local lease = exists and redis.call('XPENDING', stream, group, ARGV[i], ARGV[i], 1)[1]
  if not lease or lease[2] ~= consumer then lost[#lost + 1] = ARGV[i] end
end
return lost
