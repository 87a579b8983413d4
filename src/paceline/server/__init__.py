"""The parameter server: decides by a policy, keeps the ledger of samples, and updates the shards of the parameters."""
