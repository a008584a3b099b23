{{- define "spmmd.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "spmmd.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 42 | trimSuffix "-" -}}
{{- else if contains (include "spmmd.name" .) .Release.Name -}}
{{- .Release.Name | trunc 42 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "spmmd.name" .) | trunc 42 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "spmmd.selectorLabels" -}}
app.kubernetes.io/name: {{ include "spmmd.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "spmmd.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "spmmd.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "spmmd.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "spmmd.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "spmmd.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/*
The units of the release: one, or one a shard, each with its own services; a workload too, unless the shards are the pods of StatefulSets.
While the number of shards changes (sharding.transitionFrom), those of the smaller number keep to it and the others to the larger one: rendezvous
hashing only moves layers to or from the shards that come or go, so that every layer is found by clients of either number.
*/}}
{{- define "spmmd.units" -}}
{{- $name := include "spmmd.fullname" . -}}
{{- $shards := int .Values.sharding.shards -}}
{{- if $shards -}}
{{- $from := int (default $shards .Values.sharding.transitionFrom) -}}
{{- $low := min $shards $from | int -}}
{{- $high := max $shards $from | int -}}
units:
{{- range $index := until $high }}
  - name: {{ printf "%s-shard-%d" $name $index }}
    shard: {{ $index }}
    count: {{ ternary $low $high (lt $index $low) }}
{{- end }}
{{- else -}}
units:
  - name: {{ $name }}
{{- end -}}
{{- end -}}

{{/* "true" when the ordinals of StatefulSets are the shards. */}}
{{- define "spmmd.byOrdinals" -}}
{{- if and .Values.sharding.shards (eq .Values.sharding.by "ordinals") -}}
{{- if ne .Values.workload "StatefulSet" -}}{{- fail "sharding.by ordinals needs workload StatefulSet" -}}{{- end -}}
{{- if .Values.autoscaling.enabled -}}{{- fail "sharding.by ordinals: autoscaling would change the number of shards" -}}{{- end -}}
{{- if .Values.sharding.replicas -}}{{- fail "sharding.replicas needs sharding.by units" -}}{{- end -}}
{{- if semverCompare "<1.28.0-0" .Capabilities.KubeVersion.Version -}}{{- fail "sharding.by ordinals needs Kubernetes 1.28, which labels pods with their ordinal" -}}{{- end -}}
true
{{- end -}}
{{- end -}}

{{/*
The workloads: one a unit; with shards by ordinals, one StatefulSet for each replica, whose pods are all the shards.
*/}}
{{- define "spmmd.workloads" -}}
{{- if include "spmmd.byOrdinals" . -}}
{{- $name := include "spmmd.fullname" . -}}
units:
{{- range $replica := until (int .Values.replicas) }}
  - name: {{ printf "%s-replica-%d" $name $replica }}
    replica: {{ $replica }}
{{- end }}
{{- else -}}
{{- include "spmmd.units" . -}}
{{- end -}}
{{- end -}}

{{/* The labels that select the pods of a unit or workload; takes (dict "root" $ "unit" UNIT). */}}
{{- define "spmmd.unitLabels" -}}
{{ include "spmmd.selectorLabels" .root }}
{{- if hasKey .unit "replica" }}
spmmd/replica: {{ .unit.replica | quote }}
{{- else if hasKey .unit "shard" }}
{{- if include "spmmd.byOrdinals" .root }}
apps.kubernetes.io/pod-index: {{ .unit.shard | quote }}
{{- else }}
spmmd/shard: {{ .unit.shard | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The shard of a layer: see client/python/src/spmmd/sharding.py. Takes (dict "layer" NAME "count" N). */}}
{{- define "spmmd.shardOf" -}}
{{- $key := regexReplaceAll "/.*" .layer "" -}}
{{- $best := "" -}}
{{- $owner := 0 -}}
{{- range $index := until (int .count) -}}
{{- $score := printf "%d/%s" $index $key | sha256sum -}}
{{- if gt $score $best -}}
{{- $best = $score -}}
{{- $owner = $index -}}
{{- end -}}
{{- end -}}
{{- $owner -}}
{{- end -}}

{{/* Nine tenths of cache.size in the server's units: a volume that is full to the brim gets the pod evicted. Empty for a claim of unknown size. */}}
{{- define "spmmd.cacheLimit" -}}
{{- if and (ne .Values.cache.type "existingClaim") (regexMatch "^[0-9]+[MGT]i$" .Values.cache.size) -}}
{{- $mebi := get (dict "M" 1 "G" 1024 "T" 1048576) (regexFind "[MGT]" .Values.cache.size) -}}
{{- printf "%dMiB" (div (mul (regexFind "^[0-9]+" .Values.cache.size | int64) $mebi 9) 10) -}}
{{- end -}}
{{- end -}}

{{/* One "field: value" line a setting, in the text form of spmm.config.v1.ServerConfig. */}}
{{- define "spmmd.config" -}}
{{- $server := .Values.server -}}
listen: "0.0.0.0:{{ $server.grpcPort }}"
metrics_listen: "0.0.0.0:{{ $server.metricsPort }}"
health_listen: "0.0.0.0:{{ $server.healthPort }}"
backend: {{ $server.backend | quote }}
drain_delay: "{{ $server.drainDelaySeconds }}s"
drain_timeout: "{{ $server.drainTimeoutSeconds }}s"
max_connection_age: {{ $server.maxConnectionAge | quote }}
max_connection_age_grace: {{ $server.maxConnectionAgeGrace | quote }}
log_format: {{ $server.logFormat | quote }}
log_level: {{ $server.logLevel | quote }}
{{- if .Values.modelRepository.enabled }}
model_repository: "/models"
{{- end }}
{{- if .Values.cache.enabled }}
cache_dir: "/var/cache/spmmd"
{{- if not $server.config.cache_limit_bytes }}
{{- with include "spmmd.cacheLimit" . }}
cache_limit_bytes: {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- if .Values.sharedMemory.size }}
shared_memory: true
{{- end }}
{{- if .Values.tls.enabled }}
tls_cert: "/etc/spmmd/tls/tls.crt"
tls_key: "/etc/spmmd/tls/tls.key"
{{- if .Values.tls.clientCaSecret }}
tls_client_ca: "/etc/spmmd/client-ca/ca.crt"
{{- end }}
{{- end }}
{{- if .Values.auth.enabled }}
auth_token_file: "/etc/spmmd/auth/tokens"
{{- end }}
{{- if .Values.layers }}
manifest: "/etc/spmmd/config/layers.json"
{{- end }}
{{- range $key, $value := $server.config }}
{{- if kindIs "string" $value }}
{{ $key }}: {{ $value | quote }}
{{- else if kindIs "float64" $value }}
{{ $key }}: {{ if eq (floor $value) $value }}{{ int64 $value }}{{ else }}{{ $value }}{{ end }}
{{- else }}
{{ $key }}: {{ $value }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The pod of either workload; takes (dict "root" $ "unit" UNIT). */}}
{{- define "spmmd.pod" -}}
{{- $unit := .unit -}}
{{- with .root -}}
metadata:
  annotations:
    checksum/config: {{ include "spmmd.config" . | cat (.Values.layers | toJson) | sha256sum }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  labels:
    {{- include "spmmd.unitLabels" (dict "root" . "unit" $unit) | nindent 4 }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "spmmd.serviceAccountName" . }}
  automountServiceAccountToken: false
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml .Values.podSecurityContext | nindent 4 }}
  # Drain delay + drain timeout + time to flush and exit.
  terminationGracePeriodSeconds: {{ add .Values.server.drainDelaySeconds .Values.server.drainTimeoutSeconds 15 }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .Values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  containers:
    - name: spmmd
      image: {{ include "spmmd.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args:
        - --config=/etc/spmmd/config/spmmd.textproto
        {{- if hasKey $unit "replica" }}
        # Kubernetes puts the variable's value in: the pod's ordinal.
        - --shard-index=$(POD_INDEX)
        - --shard-count={{ .Values.sharding.shards }}
        {{- with .Values.sharding.transitionFrom }}
        - --shard-transition-from={{ . }}
        {{- end }}
        {{- else if hasKey $unit "shard" }}
        - --shard-index={{ $unit.shard }}
        - --shard-count={{ $unit.count }}
        {{- end }}
      {{- $cacheOfPod := and .Values.cache.enabled (eq .Values.cache.type "existingClaim") (eq .Values.workload "StatefulSet") }}
      {{- if or (hasKey $unit "replica") $cacheOfPod .Values.extraEnv }}
      env:
        {{- if $cacheOfPod }}
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        {{- end }}
        {{- if hasKey $unit "replica" }}
        - name: POD_INDEX
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}
        {{- end }}
        {{- with .Values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- end }}
      ports:
        - {name: grpc, containerPort: {{ .Values.server.grpcPort }}, protocol: TCP}
        - {name: metrics, containerPort: {{ .Values.server.metricsPort }}, protocol: TCP}
        - {name: health, containerPort: {{ .Values.server.healthPort }}, protocol: TCP}
      startupProbe:
        grpc: {port: {{ .Values.server.healthPort }}}
        {{- toYaml .Values.probes.startup | nindent 8 }}
      readinessProbe:
        grpc: {port: {{ .Values.server.healthPort }}}
        {{- toYaml .Values.probes.readiness | nindent 8 }}
      # A draining or loading server is alive: the probe only asks whether the process answers.
      livenessProbe:
        tcpSocket: {port: health}
        {{- toYaml .Values.probes.liveness | nindent 8 }}
      resources:
        {{- toYaml .Values.resources | nindent 8 }}
      securityContext:
        {{- toYaml .Values.securityContext | nindent 8 }}
      volumeMounts:
        - {name: config, mountPath: /etc/spmmd/config, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        {{- if .Values.modelRepository.enabled }}
        - name: models
          mountPath: /models
          readOnly: true
          {{- with .Values.modelRepository.subPath }}
          subPath: {{ . }}
          {{- end }}
        {{- end }}
        {{- if .Values.cache.enabled }}
        - name: cache
          mountPath: /var/cache/spmmd
          {{- if $cacheOfPod }}
          # A cache directory belongs to one server.
          subPathExpr: $(POD_NAME)
          {{- end }}
        {{- end }}
        {{- if .Values.tls.enabled }}
        - {name: tls, mountPath: /etc/spmmd/tls, readOnly: true}
        {{- if .Values.tls.clientCaSecret }}
        - {name: client-ca, mountPath: /etc/spmmd/client-ca, readOnly: true}
        {{- end }}
        {{- end }}
        {{- if .Values.auth.enabled }}
        - {name: auth, mountPath: /etc/spmmd/auth, readOnly: true}
        {{- end }}
        {{- if .Values.sharedMemory.size }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
    {{- with .Values.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: config
      configMap:
        name: {{ include "spmmd.fullname" . }}
    - name: tmp
      emptyDir: {sizeLimit: 64Mi}
    {{- if .Values.modelRepository.enabled }}
    - name: models
      {{- if .Values.modelRepository.image.reference }}
      image:
        reference: {{ .Values.modelRepository.image.reference }}
        pullPolicy: {{ .Values.modelRepository.image.pullPolicy }}
      {{- else }}
      persistentVolumeClaim:
        claimName: {{ required "modelRepository.existingClaim or modelRepository.image.reference is required" .Values.modelRepository.existingClaim }}
        readOnly: true
      {{- end }}
    {{- end }}
    {{- if .Values.cache.enabled }}
    {{- if eq .Values.cache.type "emptyDir" }}
    - name: cache
      emptyDir: {sizeLimit: {{ .Values.cache.size }}}
    {{- else if eq .Values.cache.type "existingClaim" }}
    {{- if and (ne .Values.workload "StatefulSet") (or .Values.autoscaling.enabled .Values.sharding.shards (ne (int .Values.replicas) 1)) }}
    {{- fail "cache.type existingClaim holds the cache of one server: with several take emptyDir, or workload StatefulSet" }}
    {{- end }}
    - name: cache
      persistentVolumeClaim:
        claimName: {{ required "cache.existingClaim is required" .Values.cache.existingClaim }}
    {{- else if ne .Values.workload "StatefulSet" }}
    {{- fail "cache.type volumeClaimTemplate needs workload StatefulSet" }}
    {{- end }}
    {{- end }}
    {{- if .Values.tls.enabled }}
    - name: tls
      secret:
        secretName: {{ required "tls.existingSecret is required" .Values.tls.existingSecret }}
    {{- with .Values.tls.clientCaSecret }}
    - name: client-ca
      secret:
        secretName: {{ . }}
    {{- end }}
    {{- end }}
    {{- if .Values.auth.enabled }}
    - name: auth
      secret:
        secretName: {{ required "auth.existingSecret is required" .Values.auth.existingSecret }}
    {{- end }}
    {{- with .Values.sharedMemory.size }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ . }}}
    {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
{{- end -}}
