"""`warmroute replay`: a trace of requests through the real routing code and simulated engines, in simulated time."""
