-- Finish tasks: acknowledge each and, only if that is the first time, store its result and send its header.
-- A second finisher (a process taken for dead that was not, or a call repeated because its reply was lost)
-- finds the task gone and changes nothing. Acknowledging and deleting always happen in one script, so the call that
-- finds the entry is the first; acknowledging and deleting many at once is cheaper than one by one.
-- The result is stored under the entry's own id, whatever the process says: the sampler waits for that id.
--
-- KEYS: stream, samples, counters, dead, prefixes of payload keys and of previous-response keys
-- ARGV: group, then five for each task: entry id, header, payload or '', prompt id or '', dead letter or ''
local stream, samples, counters, dead, payloads, previous = unpack(KEYS)

local function id_of(entry)
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'id' then return entry[2][i + 1] end
  end
  return ''
end

redis.call('HDEL', counters, '') -- a full Redis continues a script whose first write frees memory
local first, seen = {}, {}
for i = 2, #ARGV, 5 do
  local entry, header, payload, prompt, letter = unpack(ARGV, i, i + 4)
  local leased = not seen[entry] and redis.call('XRANGE', stream, entry, entry)[1]
  if leased then
    local id = id_of(leased)
    seen[entry] = true
    first[#first + 1] = entry
    if payload ~= '' then
      redis.call('SET', payloads .. id, payload)
      if prompt ~= '' then redis.call('SET', previous .. prompt, payload) end
    end
    redis.call('XADD', samples, '*', 'id', id, 'header', header)
    if letter ~= '' then
      redis.call('XADD', dead, 'MAXLEN', '~', '10000', '*', 'letter', letter) -- 10000: `MAX_LETTERS` of dead.py
    end
  end
end
if #first > 0 then
  redis.call('XDEL', stream, unpack(first))
  redis.call('XACK', stream, ARGV[1], unpack(first))
end
redis.call('HINCRBY', counters, 'finished', #first)
redis.call('HINCRBY', counters, 'finished_twice', (#ARGV - 1) / 5 - #first)
return #first
