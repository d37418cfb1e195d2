-- Put tasks back for any generator: acknowledge the old entry and add a new one, or neither.
-- Only tasks that this process still holds are put back: a task that was taken over is finished by its new holder.
--
-- KEYS: stream
-- ARGV: group, consumer, then two for each task: entry id, attempt
local stream, group, consumer, moved = KEYS[1], ARGV[1], ARGV[2], 0
if redis.call('EXISTS', stream) == 0 then return 0 end -- an evaluation that is over
for i = 3, #ARGV, 2 do
  local lease = redis.call('XPENDING', stream, group, ARGV[i], ARGV[i], 1)[1]
  if lease and lease[2] == consumer then
    local entry = redis.call('XRANGE', stream, ARGV[i], ARGV[i])[1]
    redis.call('XACK', stream, group, ARGV[i])
    -- An entry that was deleted by hand stays deleted: the sampler sends its task again.
    if entry then
      local fields = {}
      for j = 1, #entry[2], 2 do
        if entry[2][j] ~= 'attempt' then
          fields[#fields + 1] = entry[2][j]
          fields[#fields + 1] = entry[2][j + 1]
        end
      end
      redis.call('XDEL', stream, ARGV[i])
      redis.call('XADD', stream, '*', 'attempt', ARGV[i + 1], unpack(fields))
      moved = moved + 1
    end
  end
end
return moved
