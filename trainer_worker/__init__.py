"""The TrainerWorker: sessions, gRPC service and engines beside the accelerator."""
