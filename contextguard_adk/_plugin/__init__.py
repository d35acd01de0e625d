"""The work behind the plugin's callbacks that is not about one history."""
