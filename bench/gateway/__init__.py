"""What a request costs in a router: warmroute beside the Rust routers and a plain proxy, on the same engines."""
