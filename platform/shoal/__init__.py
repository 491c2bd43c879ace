"""Train and serve large language models; this package knows torch and nothing of Ray."""
