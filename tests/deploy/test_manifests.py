"""kubernetes.yaml and kuberay.yaml against schemas, and their parts against each other."""

import copy
import importlib

import pytest
import yaml

from tests.deploy.helpers.files import END_S, PORT, read_manifest, read_yaml, unknown_flags


def test_kubernetes_accepts_every_object() -> None:
    """Kubernetes' own schemas, where a key that they do not know is an error."""
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed").validate
    for found in read_manifest().values():
        validate(found, desired_version="1.37", strict=True)


def test_the_schemas_would_refuse_a_wrong_key() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    found = copy.deepcopy(read_manifest()["StatefulSet"])
    found["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(found, desired_version="1.37", strict=True)


def test_the_objects_of_the_manifest_refer_to_each_other() -> None:
    objects = read_manifest()
    stateful_set, service = objects["StatefulSet"]["spec"], objects["Service"]
    template = stateful_set["template"]
    pod = template["spec"]
    (container,) = pod["containers"]
    assert stateful_set["selector"]["matchLabels"] == service["spec"]["selector"] == template["metadata"]["labels"]
    assert stateful_set["serviceName"] == service["metadata"]["name"]
    (port,) = container["ports"]
    assert port["containerPort"] == PORT
    assert [used["targetPort"] for used in service["spec"]["ports"]] == [port["name"]]
    assert {container[f"{name}Probe"]["httpGet"]["port"] for name in ("startup", "liveness", "readiness")} == {"http"}
    volumes = [volume["name"] for volume in pod["volumes"]]
    volumes += [claim["metadata"]["name"] for claim in stateful_set["volumeClaimTemplates"]]
    assert sorted(mount["name"] for mount in container["volumeMounts"]) == sorted(volumes)
    (config,) = [volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume]
    assert config == objects["ConfigMap"]["metadata"]["name"]
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(PORT)


def test_ray_serve_and_the_application_accept_the_configuration() -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="Ray is not installed")
    config = schema.ServeDeploySchema.model_validate(yaml.safe_load(read_yaml("kuberay.yaml")["spec"]["serveConfigV2"]))
    (described,) = config.applications
    module, _, name = described.import_path.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    application = importlib.import_module(f"{module}.application")
    arguments = application.AppArguments.model_validate(described.args)
    importlib.import_module(f"{module}.placement").checked_words(arguments.flags)
    deletion_s = read_yaml("kuberay.yaml")["spec"]["rayClusterDeletionDelaySeconds"]
    assert deletion_s >= application.DRAIN_S + END_S


def test_the_application_has_flags_that_exist_and_fits_into_a_worker() -> None:
    spec = read_yaml("kuberay.yaml")["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    assert application["import_path"] == "tokasaurus.ray:app"
    arguments = application["args"]
    assert unknown_flags(list(arguments["flags"])) == set()
    (group,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert group["rayStartParams"]["num-cpus"] == container["resources"]["limits"]["cpu"]
    assert int(group["rayStartParams"]["num-cpus"]) == arguments["num_cpus"] + 1  # the ingress
    (deployment,) = application["deployments"]
    scaling = deployment["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (group["minReplicas"], group["maxReplicas"])


def test_kubernetes_accepts_the_pods_of_the_ray_cluster() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed").validate
    cluster = read_yaml("kuberay.yaml")["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, **group["template"]}
        validate(pod, desired_version="1.37", strict=True)
