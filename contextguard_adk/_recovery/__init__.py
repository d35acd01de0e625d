"""What is done after a provider's rejection, and where everything else has failed."""
