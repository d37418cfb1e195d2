-- Return the task ids in a slice of a stream of tasks or samples, without the rest of the entries.
--
-- KEYS: stream
-- ARGV: first entry id, or '(' and the last one read; how many
-- Returns: id of the last entry or '' at the end of the stream; task ids
local entries, ids = redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2]), {}
for _, entry in ipairs(entries) do
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'id' then ids[#ids + 1] = entry[2][i + 1] end
  end
end
return {#entries == tonumber(ARGV[2]) and entries[#entries][1] or '', ids}
