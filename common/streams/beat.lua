-- Renews the lease of a generator's tasks: their idle time starts anew, so that XAUTOCLAIM passes them by.
-- Tasks that another generator has taken over meanwhile stay its own and are returned.
--
-- KEYS: tasks
-- ARGV: group, consumer, then entry ids
local tasks, group, consumer, lost = KEYS[1], ARGV[1], ARGV[2], {}
for i = 3, #ARGV do
  local pending = redis.call('XPENDING', tasks, group, ARGV[i], ARGV[i], 1)
  if #pending == 1 and pending[1][2] == consumer then
    redis.call('XCLAIM', tasks, group, consumer, 0, ARGV[i], 'JUSTID')
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
