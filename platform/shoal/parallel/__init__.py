"""How ranks share one model or one sequence, beside sharding its data; a package for each way."""
