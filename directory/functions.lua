#!lua name=warmroute_v1
-- The directory's rules, atomically. README.md beside this file has the schema; memory.py has the rules in Python.

local INCARNATION_BYTES = 8
local HOLDER_BYTES = 9
local LOST = -1
local SWEEP_INTERVAL_MS = 60000
local ATTEMPTS_LOOKED_AT = 2
local DIRECTORY_KEY_BYTES = 16
local STATES_MAX = 64
local WHOLE_DIGITS_MAX = 15

local function now_ms()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end

-- What callers say ---------------------------------------------------------------------------------------------------
-- All of a call is checked before anything is written, so that a malformed one changes nothing. Numbers are digits,
-- few enough that Lua's doubles are exact and no expiry overflows.

local function is_whole(text)
  return #text <= WHOLE_DIGITS_MAX and string.find(text, '^%d+$') ~= nil
end

local function is_span(text)
  return is_whole(text) and tonumber(text) > 0
end

local function is_life(text)
  return #text == INCARNATION_BYTES
end

local function is_number_or_lost(text)
  return text == '-1' or is_whole(text)
end

local function is_life_or_none(text)
  return text == '' or is_life(text)
end

local function is_version(text)
  return string.find(text, '^v%d+$') ~= nil
end

local function is_text()
  return true
end

-- `named`: for each argument its name and what it must be. Nothing where all is well, else what isn't, as an error.
local function fault_of(keys, keys_min, keys_max, args, named)
  if #keys < keys_min or #keys > keys_max then
    return redis.error_reply(string.format('ERR warmroute: %d keys, not %d to %d', #keys, keys_min, keys_max))
  end
  if #args ~= #named then
    return redis.error_reply(string.format('ERR warmroute: %d arguments, not %d', #args, #named))
  end
  for index, each in ipairs(named) do
    if not each[2](args[index]) then
      return redis.error_reply('ERR warmroute: not ' .. each[1] .. ': argument ' .. index)
    end
  end
end

local LIFE = {'an incarnation of 8 bytes', is_life}
local REMEMBERED = {'a span in ms', is_span}
local TERM = {'a term in ms', is_span}
local VERSION = {'a version of the schema', is_version}
local JSON = {'a text', is_text}
local OF_A_BATCH = {
  LIFE, {'an attempt', is_whole}, {'a ttl in ms', is_span}, {'masks', is_text},
  {'the life left behind, 8 bytes or none', is_life_or_none}, REMEMBERED,
  {'the last attempt acknowledged', is_number_or_lost},
}
local OF_A_REGISTRATION = {LIFE, JSON, JSON, TERM, REMEMBERED, VERSION}
local OF_A_RENEWAL = {LIFE, JSON, TERM, REMEMBERED}
local OF_AN_END = {LIFE, REMEMBERED}

local function fault_of_batch(keys, args)
  local fault = fault_of(keys, 1, 1 + STATES_MAX, args, OF_A_BATCH)
  if fault then
    return fault
  end
  if #args[4] ~= #keys - 1 then
    return redis.error_reply(string.format('ERR warmroute: %d masks for %d keys', #args[4], #keys - 1))
  end
  local prefix = string.match(keys[1], '^(.+:)attempts$')
  if not prefix then
    return redis.error_reply('ERR warmroute: the first key is not that of attempts')
  end
  local find, record_bytes = string.find, #prefix + DIRECTORY_KEY_BYTES
  for index = 2, #keys do
    local key = keys[index]
    if #key ~= record_bytes or find(key, prefix, 1, true) ~= 1 then
      return redis.error_reply("ERR warmroute: not a record's key of that partition: key " .. index)
    end
  end
end

-- Placements ---------------------------------------------------------------------------------------------------------

-- A partition's attempts are one hash: incarnation -> 'attempt:ms', when it last applied a batch of that life, by this
-- server's clock; '!' before it where it has lost writes of that life. It judges by it who is forgotten. Where `now` has
-- gone back behind an entry's time, that entry is young.

-- '!' or '', and the attempt; nothing where there is none, or one too old to be remembered.
local function attempt_of(packed, now, remembered_ms)
  local mark, number, heard_ms = string.match(packed or '', '^(!?)(%d+):(%d+)$')
  if not number or now - tonumber(heard_ms) > remembered_ms then
    return nil
  end
  return mark, tonumber(number)
end

-- Whether this partition hasn't heard of a life for so long that its holders go; asked once a life and batch.
local function is_forgotten(life, batch)
  local forgotten = batch.forgotten[life]
  if forgotten == nil then
    forgotten = attempt_of(redis.call('HGET', batch.attempts_key, life), batch.now, batch.remembered_ms) == nil
    batch.forgotten[life] = forgotten
  end
  return forgotten
end

-- A look at a few entries with each batch keeps the hash as long as the lives remembered, without a sweep of all.
local function drop_forgotten_attempts(batch)
  local flat = redis.call('HRANDFIELD', batch.attempts_key, -ATTEMPTS_LOOKED_AT, 'WITHVALUES')
  for index = 1, #flat, 2 do
    if not attempt_of(flat[index + 1], batch.now, batch.remembered_ms) then
      redis.call('HDEL', batch.attempts_key, flat[index])
    end
  end
end

-- `record` without the life that the writer leaves behind, without forgotten ones and without a torn end.
local function pruned(record, batch)
  local kept = {}
  for start = 1, #record - HOLDER_BYTES + 1, HOLDER_BYTES do
    local life = string.sub(record, start, start + INCARNATION_BYTES - 1)
    if life ~= batch.replaces and not is_forgotten(life, batch) then
      kept[#kept + 1] = string.sub(record, start, start + HOLDER_BYTES - 1)
    end
  end
  return table.concat(kept)
end

-- `record` with the writer's holder as it is now ('' for none), in the order of incarnations, so that the records of
-- chunks with the same holders have equal bytes. Most records need no pruning: that is found out on the way.
local function updated(record, holder, batch)
  local own, replaces = batch.incarnation, batch.replaces
  if #record % HOLDER_BYTES ~= 0 then
    return updated(pruned(record, batch), holder, batch)
  end
  local place_at, own_bytes = nil, 0
  for start = 1, #record, HOLDER_BYTES do
    local life = string.sub(record, start, start + INCARNATION_BYTES - 1)
    if life == own then
      place_at, own_bytes = start, HOLDER_BYTES
    elseif life == replaces or is_forgotten(life, batch) then
      return updated(pruned(record, batch), holder, batch)
    elseif not place_at and own < life then
      place_at = start
    end
  end
  place_at = place_at or #record + 1
  return string.sub(record, 1, place_at - 1) .. holder .. string.sub(record, place_at + own_bytes)
end

-- `updated`, once for all chunks of a batch that had the same record.
local function updated_once(record, mask, batch)
  local seen = batch.seen[mask]
  if not seen then
    seen = {}
    batch.seen[mask] = seen
  end
  local value = seen[record]
  if not value then
    value = updated(record, mask == '\0' and '' or batch.incarnation .. mask, batch)
    seen[record] = value
  end
  return value
end

-- Expiry is only ever raised: two writers share a record, and the longer promise holds.
-- `record` is what MGET said: false also for a key that holds no string. Our prefix is ours, so such a key is replaced:
-- one that stayed would keep its partition from ever being announced whole.
local function write(key, record, mask, batch)
  if not record then
    if mask == '\0' or redis.call('SET', key, batch.incarnation .. mask, 'NX', 'PX', batch.ttl_text) then
      return
    end
    redis.call('SET', key, batch.incarnation .. mask, 'PX', batch.ttl_text)
    return
  end
  local value = updated_once(record, mask, batch)
  if value == '' then
    redis.call('DEL', key)
  elseif value == record then
    redis.call('PEXPIRE', key, batch.ttl_text, 'GT')
  else
    local left_ms = redis.call('PTTL', key)
    redis.call('SET', key, value, 'PX', left_ms > batch.ttl_ms and left_ms or batch.ttl_text)
  end
end

-- keys: the partition's attempts, then one record a state.
-- args: incarnation, attempt, ttl in ms, one mask byte a state, the life left behind or '', how long a life is
-- remembered that isn't heard of in ms, the last attempt that was acknowledged.
-- Returns the attempt held before; -1 for none, or where this partition has lost writes of this incarnation: the loss
-- is remembered ('!'), as the attempt that met it may be one whose answer never arrived.
local function place(keys, args)
  local fault = fault_of_batch(keys, args)
  if fault then
    return fault
  end
  local now, remembered_ms = now_ms(), tonumber(args[6])
  local mark, number = attempt_of(redis.call('HGET', keys[1], args[1]), now, remembered_ms)
  local held = number or LOST
  if tonumber(args[2]) <= held then
    return mark == '!' and LOST or held
  end
  local batch = {
    incarnation = args[1],
    ttl_text = args[3],
    ttl_ms = tonumber(args[3]),
    replaces = args[5],
    attempts_key = keys[1],
    now = now,
    remembered_ms = remembered_ms,
    forgotten = {},
    seen = {},
  }
  local records = #keys > 1 and redis.call('MGET', unpack(keys, 2)) or {}
  for index = 1, #keys - 1 do
    write(keys[index + 1], records[index], string.sub(args[4], index, index), batch)
  end
  local lost_writes = mark == '!' or held < tonumber(args[7])
  redis.call('HSET', keys[1], args[1], string.format('%s%s:%.0f', lost_writes and '!' or '', args[2], now))
  drop_forgotten_attempts(batch)
  return lost_writes and LOST or held
end

-- As `place`, for batches that only remove.
local function withdraw(keys, args)
  if args[4] and string.find(args[4], '%Z') then
    return redis.error_reply('ERR warmroute: a withdrawal only removes')
  end
  return place(keys, args)
end

-- The fleet's table --------------------------------------------------------------------------------------------------
-- One hash; each incarnation has three fields: 'r' its registration, 'l' its load, 't' its times as
-- 'expires_ms:retired_ms' by the server's clock (retired 0 while it isn't). 'swept': when old rows were last dropped.

local function pack_times(expires_ms, retired_ms)
  return string.format('%.0f:%.0f', expires_ms, retired_ms)
end

-- expires_ms and retired_ms of a row; nothing where there is no row, or one that ended too long ago to be remembered.
local function times_of(packed, now, remembered_ms)
  local expires, retired = string.match(packed or '', '^(%d+):(%d+)$')
  if not expires then
    return nil
  end
  local expires_ms, retired_ms = tonumber(expires), tonumber(retired)
  local ended_ms = retired_ms > 0 and retired_ms or expires_ms
  if now - ended_ms > remembered_ms then
    return nil
  end
  return expires_ms, retired_ms
end

local function drop_old_rows(table_key, now, remembered_ms)
  local swept_ms = tonumber(redis.call('HGET', table_key, 'swept') or '0') or 0
  if swept_ms <= now and now - swept_ms < SWEEP_INTERVAL_MS then
    return
  end
  for _, field in ipairs(redis.call('HKEYS', table_key)) do
    if #field == INCARNATION_BYTES + 1 and string.sub(field, 1, 1) == 't' then
      if not times_of(redis.call('HGET', table_key, field), now, remembered_ms) then
        local incarnation = string.sub(field, 2)
        redis.call('HDEL', table_key, field, 'r' .. incarnation, 'l' .. incarnation)
      end
    end
  end
  redis.call('HSET', table_key, 'swept', string.format('%.0f', now))
end

-- keys: the table, the versions. args: incarnation, registration, load, term in ms, how long rows are remembered in
-- ms, the schema's version. Returns 1, or 0 where the incarnation is taken.
local function register(keys, args)
  local fault = fault_of(keys, 2, 2, args, OF_A_REGISTRATION)
  if fault then
    return fault
  end
  local now, remembered_ms = now_ms(), tonumber(args[5])
  drop_old_rows(keys[1], now, remembered_ms)
  if times_of(redis.call('HGET', keys[1], 't' .. args[1]), now, remembered_ms) then
    return 0
  end
  local times = pack_times(now + tonumber(args[4]), 0)
  redis.call('HSET', keys[2], args[6], string.format('%.0f', now))  -- first, as it may hold something else
  redis.call('HSET', keys[1], 'r' .. args[1], args[2], 'l' .. args[1], args[3], 't' .. args[1], times)
  return 1
end

-- keys: the table. args: incarnation, load, term in ms, how long rows are remembered in ms.
-- Returns {1, ms since it lapsed or 0}, or {0, 0} where it is unknown or retired.
local function renew(keys, args)
  local fault = fault_of(keys, 1, 1, args, OF_A_RENEWAL)
  if fault then
    return fault
  end
  local now, remembered_ms = now_ms(), tonumber(args[4])
  drop_old_rows(keys[1], now, remembered_ms)
  local expires_ms, retired_ms = times_of(redis.call('HGET', keys[1], 't' .. args[1]), now, remembered_ms)
  if not expires_ms or retired_ms > 0 then
    return {0, 0}
  end
  local times = pack_times(now + tonumber(args[3]), 0)
  redis.call('HSET', keys[1], 'l' .. args[1], args[2], 't' .. args[1], times)
  return {1, math.max(0, now - expires_ms)}
end

-- keys: the table. args: incarnation, how long rows are remembered in ms. Returns 1, or 0 where there was nothing live.
local function retire(keys, args)
  local fault = fault_of(keys, 1, 1, args, OF_AN_END)
  if fault then
    return fault
  end
  local now = now_ms()
  local expires_ms, retired_ms = times_of(redis.call('HGET', keys[1], 't' .. args[1]), now, tonumber(args[2]))
  if not expires_ms or retired_ms > 0 then
    return 0
  end
  redis.call('HSET', keys[1], 't' .. args[1], pack_times(expires_ms, now))
  return 1
end

-- What must work when the server is out of memory is marked allow-oom: only new placements are refused then.
redis.register_function{function_name = 'wr_v1_place', callback = place}
redis.register_function{function_name = 'wr_v1_withdraw', callback = withdraw, flags = {'allow-oom'}}
redis.register_function{function_name = 'wr_v1_register', callback = register, flags = {'allow-oom'}}
redis.register_function{function_name = 'wr_v1_renew', callback = renew, flags = {'allow-oom'}}
redis.register_function{function_name = 'wr_v1_retire', callback = retire, flags = {'allow-oom'}}
