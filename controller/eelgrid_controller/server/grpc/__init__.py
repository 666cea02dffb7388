"""gRPC services of the controller: the stream of each agent and the operators' API."""
