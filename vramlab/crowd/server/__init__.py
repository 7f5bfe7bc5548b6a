"""The shared collection's server: takes bundles in, re-derives every number, says who reproduced what. Needs the extra `server`."""
