-- What wrk sends to the gateway, and what it makes of the answers. BENCH_BODY has the request, BENCH_WANTED a
-- text that each right answer has.
wrk.method = 'POST'
wrk.body = os.getenv('BENCH_BODY')
wrk.headers['Content-Type'] = 'application/json'
local wanted = os.getenv('BENCH_WANTED')
local threads, wrong = {}, 0
function setup(thread) table.insert(threads, thread) end
function response(status, headers, body)
  if status ~= 200 or not string.find(body, wanted, 1, true) then wrong = wrong + 1 end
  wrk.thread:set('wrong', wrong)
end
function done(summary, latency)
  local failed = summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.timeout
  for _, thread in ipairs(threads) do failed = failed + (thread:get('wrong') or 0) end
  io.write(string.format(
    '{"requests": %d, "seconds": %.6f, "wrong": %d, "p50_ms": %.4f, "p99_ms": %.4f}\n',
    summary.requests, summary.duration / 1e6, failed, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3))
end
