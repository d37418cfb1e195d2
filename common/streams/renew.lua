-- Renew the leases of a slice of the tasks, whoever holds them: Redis' clock was set, so their idle times say nothing.
--
-- KEYS: tasks
-- ARGV: group, first entry id, or '(' and the last one renewed; how many
-- Returns: the last entry id, or '' where there are no more
local tasks, group = KEYS[1], ARGV[1]
if redis.call('EXISTS', tasks) == 0 then return '' end
local leases = redis.call('XPENDING', tasks, group, ARGV[2], '+', ARGV[3])
for _, lease in ipairs(leases) do
  redis.call('XCLAIM', tasks, group, lease[2], 0, lease[1], 'JUSTID')
end
return #leases == tonumber(ARGV[3]) and leases[#leases][1] or ''
