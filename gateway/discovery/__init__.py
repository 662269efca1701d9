"""Engines that somebody else keeps the list of: Kubernetes' EndpointSlices."""
