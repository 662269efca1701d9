"""The warmroute command: the local fleet, its demo, and the tools."""
