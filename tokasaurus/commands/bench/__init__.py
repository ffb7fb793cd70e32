"""`toka bench`: measures OpenAI-compatible servers.

Knows requests of each workload, HTTP, the metrics pages of some servers, and how these are started. Does not know the
engine: ours is measured like any other, over HTTP.

run → measure (one load on one server) → client, with the requests of workloads; peers starts servers, scrape reads
their metrics, figures is what comes out, compare sets runs side by side, html draws them."""
