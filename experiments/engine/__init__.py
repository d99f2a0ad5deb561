"""The engine of experiments: settings from TOML, records of every split, stored results that runs resume from."""
