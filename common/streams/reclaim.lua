-- Lease once more what a generator has without knowing it: the reply that brought it was lost, or another process had
-- its name.
--
-- KEYS: stream
-- ARGV: group, consumer, silence in ms, most tasks, how many leases to look at, then ids of the entries it knows of
-- Returns: (entry id, fields, times delivered before) of each task
local stream, group, consumer, silence, most, look = KEYS[1], unpack(ARGV, 1, 5)
local known, taken = {}, {}
for i = 6, #ARGV do known[ARGV[i]] = true end
if redis.call('EXISTS', stream) == 0 then return taken end -- an evaluation that is over
for _, lease in ipairs(redis.call('XPENDING', stream, group, 'IDLE', silence, '-', '+', look, consumer)) do
  if #taken >= tonumber(most) then break end
  if not known[lease[1]] then
    local entry = redis.call('XCLAIM', stream, group, consumer, 0, lease[1])[1]
    if entry and entry[2] then taken[#taken + 1] = {entry[1], entry[2], lease[4]} end
  end
end
return taken
