-- Take the sampler's lease if it is free, or renew it, or give it back.
--
-- KEYS: lease, state
-- ARGV: owner, the lease's length in ms or 0 to give it back, a holder that is known to be dead or ''
-- Returns: its holder now or '', number of the last commit
local lease, state, owner, length = KEYS[1], KEYS[2], ARGV[1], tonumber(ARGV[2])
local holder = redis.call('GET', lease)
if not holder or holder == owner or holder == ARGV[3] then
  redis.call('DEL', lease) -- a full Redis continues a script whose first write frees memory
  holder = ''
  if length > 0 then
    redis.call('SET', lease, owner, 'PX', length)
    holder = owner
  end
elseif length > 0 and redis.call('PTTL', lease) > length then
  -- Redis' clock was set back: no lease is longer than that.
  redis.call('PEXPIRE', lease, length)
end
return {holder, redis.call('HGET', state, 'sequence') or '0'}
