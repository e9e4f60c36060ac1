-- wrk's part in `one_shot.py`: posts the body that BENCH_BODY holds, and says as JSON what came of it.
wrk.method = "POST"
wrk.body = os.getenv("BENCH_BODY")
wrk.headers["Content-Type"] = "application/json"

function done(summary, latency, requests)
   local errors = summary.errors
   local wrong = errors.connect + errors.read + errors.write + errors.timeout + errors.status
   io.write(string.format(
      '{"requests": %d, "seconds": %.6f, "p50_ms": %.3f, "p99_ms": %.3f, "wrong": %d}\n',
      summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3, wrong))
end
