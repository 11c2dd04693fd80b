"""Where programs run: shardings, back ends, processes, memory."""
