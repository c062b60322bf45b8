"""What this machine is: processors, memory, file systems, ports, processes. Readings only; no policy."""
