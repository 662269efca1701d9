"""What becomes of requests when engines fail: warmroute beside the Rust routers, the same faults one after another."""
