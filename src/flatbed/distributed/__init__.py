"""What tables and optimizers need of several ranks: exchanges, shards, and errors that name a rank."""
