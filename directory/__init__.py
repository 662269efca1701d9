"""The shared language of warmroute (keys, identities, tiers, engines and hosts, costs) and the fleet directory."""
